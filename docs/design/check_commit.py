#!/usr/bin/env python3
"""Explicit-state model checker (exhaustive BFS) for the step commit and recovery decision of design/commit.md.

Model: 3 ranks, 1-2 standbys, 2 steps, vote tree 0 -> {1,2} (or chain 0 -> 1 -> 2), buddy(r) = r+1 mod 3.
Messages are a set that only grows: anything ever sent may be delivered late, twice, or never (TLA+ style), so a crash
between two sends, a lost result, a slow mover and a delayed command are all covered. Command `abort` of a planned
migration is the exception: each worker handles it once.

What a worker's state means
  S empty standby | C computing step n | G gradients done, extras sent | F voted "failed" | V voted, waits for the result
  O knows commit, inside collectives after the vote | P poisoned before its vote | H hold (revoked after its vote)
  B told abort, or revoked at a boundary | Z frozen at a boundary | R ready for generation RD | D all steps done
AP = steps applied; EX = version of the extras (RNG, loader, buffers) it would start its next step with; both must equal n when
step n starts. BAD = ground truth "tracked state is wrong" (2: and it knows). STO = versions of its neighbour's extras it holds.

Rules that can be switched on (each is one sentence for the text; see commit.md):
  CUT       collect(g') ends generation g in the rank before it answers: no vote result, extras or frame of g counts afterwards
  PROMISE   an answer to collect(g') is a promise: no command (decision, resume, freeze, abort) of a generation below g' is obeyed
  ALL       the decision needs an answer of every member of g' that is not empty-handed; who does not answer leaves by a new plan
  KEEP2     a buddy keeps two versions of extras, n and n+1
  REBUDDY   before the first step of every generation, also the first one, each rank's extras are at its buddy
  XKNOW     receiving extras n+2 (anything of step n+1) is knowledge of commit(n)
  DIRTYACK  the acknowledgement of a decision says clean or dirty; only clean acks are donors
  TAIL      a collective poisoned anywhere between the vote and the end of the block makes the rank dirty
  EXIT      no worker leaves the last step before every rank is known to have committed it
  RELINK    an abort without a dead worker leads to a plan without leavers (same workers, next generation)
  WAL       what ends a generation is durable first: migration.decided of a planned switch stands before its first command, and then
            nothing takes it back; only forward, to a new generation
  REMEMBER  a worker that was told abort(m) never freezes for m
  RESET     a worker that comes back is a new, empty worker
  FASTFAIL  who votes failed does not owe extras; failed and abort travel at once and end a wait for extras or votes

Without a rule the search stops at the shortest counterexample; "*" looks past deadlocks for wrong states.

Not modelled: who detects (plans appear as soon as somebody is dead or suspected), what a rollback to a snapshot restores (it is a
named end here), bytes on the links, extras that change between vote and next opening, corruption.

Extras beyond the decided step are dropped when it is obeyed: the retry sends its own.

Run: python3 check_commit.py [scenario ...]   (all: about seven minutes on one core)
"""
import sys
import time
from collections import deque

ST, GEN, PH, AP, EX, PR, RD, BAD, STO, FZ, AB = range(11)
FAULTS = ("crash", "suspect", "mover", "glitch", "planned", "mrestart", "rejoin")
CRASH, SUSPECT, MOVER, GLITCH, PLANNED, MRESTART, REJOIN = range(7)
SUSBITS = 7
ALLRULES = ("CUT", "PROMISE", "ALL", "KEEP2", "REBUDDY", "XKNOW", "DIRTYACK", "TAIL", "EXIT", "RELINK", "WAL", "REMEMBER", "RESET", "FASTFAIL")


class Violation(Exception):
    pass


class Model:
    def __init__(self, rules=(), steps=2, standbys=1, chain=False, independent=False, opt=None, exits=False, leaver=1, seq=False, **faults):
        self.rules, self.N, self.standbys, self.independent = frozenset(rules), steps, standbys, independent
        self.opt, self.exits, self.leaver = opt, exits, leaver  # opt: None | "zero" | "tail"
        self.seq = seq  # a crash happens only while all members run in the current generation
        self.parent = {1: 0, 2: 1} if chain else {1: 0, 2: 0}
        self.kids = {r: [c for c, p in self.parent.items() if p == r] for r in range(3)}
        self.budget = tuple(faults.get(f, 0) for f in FAULTS) + (0,)

    # ---------------------------------------------------------------- states
    def initial(self):
        held = 1 if "REBUDDY" in self.rules else 0  # bit 0: extras for step 0 are at the buddy before it starts
        w = [("u", 1, "C", 0, 0, 0, 0, 0, held, 0, 0) for _ in range(3)]
        w += [("u", 0, "S", 0, 0, 0, 0, 0, 0, 0, 0) for _ in range(self.standbys)]
        return (tuple(w), ((0, 1, 2),), 1, 0, frozenset(), self.budget)

    def gc(self, s):
        """Drop messages that nobody can accept any more (keeps the state space small, loses no behaviour)."""
        W, A, cur, pend, M, F = s
        act = "CGVFO" if "CUT" in self.rules else "CGVFOH"
        low = {}
        for w in W:
            if w[ST] == "u" and w[GEN] and w[PH] in act:
                low[w[GEN]] = min(low.get(w[GEN], 99), w[AP])
        keep = []
        for m in M:
            k, g = m[0], m[1]
            if k in "VR":
                if g not in low or m[2] < low[g]:
                    continue
            elif k == "X":
                if g not in low or m[2] <= low[g]:
                    continue
            elif k in ("Q", "A", "D", "OK", "S") and g < cur and g != pend:
                if not any(w[ST] == "u" and w[GEN] < g and ("PROMISE" not in self.rules or w[PR] <= g) and i in A[g - 1] for i, w in enumerate(W)):
                    continue
                if k in ("Q", "A"):
                    continue
            elif k in ("F", "Y", "E") and g != pend and not any(w[ST] == "u" and w[GEN] < g and (w[FZ] == g or w[AB] < g) for w in W):
                continue
            keep.append(m)
        return s if len(keep) == len(M) else (W, A, cur, pend, frozenset(keep), F)

    # ---------------------------------------------------------------- helpers
    @staticmethod
    def up(W, i, *fv):
        w = list(W[i])
        for f, v in fv:
            w[f] = v
        return W[:i] + (tuple(w),) + W[i + 1:]

    def store(self, sto, ver):
        sto |= 1 << ver
        keep = 2 if "KEEP2" in self.rules else 1
        top = sto.bit_length() - 1
        return sto & ~((1 << max(0, top - keep + 1)) - 1)

    def applied(self, W, i, fz, M):
        """Rank i finishes step n with a known commit; returns new workers and messages."""
        w = W[i]
        n = w[AP]
        if w[EX] != n + 1:
            raise Violation(f"worker {i} ends step {n} with extras version {w[EX]}")
        if n + 1 == self.N:
            return self.up(W, i, (AP, n + 1), (PH, "D"), (FZ, 0)), (M | {("N", w[GEN], i)} if self.exits else M)
        if fz and not ("REMEMBER" in self.rules and w[AB] >= fz):
            return self.up(W, i, (AP, n + 1), (PH, "Z"), (FZ, fz)), M | {("Y", fz, i, n + 1)}
        return self.up(W, i, (AP, n + 1), (PH, "C"), (FZ, 0)), M

    def committed(self, W, i, fz, M):
        if self.opt:
            return self.up(W, i, (PH, "O"), (FZ, fz)), M
        return self.applied(W, i, fz, M)

    @staticmethod
    def giver(M, g):
        """The worker that gives its rank away in the planned switch to g and is asked as well, until its joiner runs; or -1."""
        if any(m[0] == "S" and m[1] == g for m in M):
            return -1
        return next((m[2] for m in M if m[0] == "L" and m[1] == g), -1)

    # ---------------------------------------------------------------- transitions
    def successors(self, s):
        """Yields (label, next state, is_fault)."""
        W, A, cur, pend, M, F = s
        rules = self.rules
        promise, cut = "PROMISE" in rules, "CUT" in rules
        for i, w in enumerate(W):
            if w[ST] != "u":
                continue
            g, ph, n = w[GEN], w[PH], w[AP]
            if g:
                a = A[g - 1]
                r = a.index(i)
                prot = (r - 1) % 3
                if ph == "C":
                    if self.independent or all(W[x][GEN] == g and (W[x][AP] > n or (W[x][AP] == n and W[x][PH] not in "SZR")) for x in a):
                        yield f"worker {i} (rank {r}) finishes the gradients of step {n}, sends extras {n+1}", (self.up(W, i, (PH, "G"), (EX, n + 1)), A, cur, pend, M | {("X", g, n + 1, r)}, F), False
                if ("KEEP2" not in rules or self.independent) and ph in ("CGVFOZD" if cut else "CGVFOZDHPB"):
                    for m in M:
                        if m[0] == "X" and m[1] == g and m[3] == prot and not w[STO] >> m[2]:
                            W2, M2 = self.up(W, i, (STO, self.store(w[STO], m[2]))), M
                            if "XKNOW" in rules and ph == "V" and m[2] == n + 2:
                                W2, M2 = self.committed(W2, i, 0, M | {("R", g, n, r, "c", 0)} if self.kids[r] else M)
                            yield f"worker {i} (rank {r}) receives extras {m[2]} of rank {prot}", (W2, A, cur, pend, M2, F), False
                if ph == "G":
                    votes = [next((m for m in M if m[0] == "V" and m[1] == g and m[2] == n and m[3] == c), None) for c in self.kids[r]]
                    if all(votes) and (("X", g, n + 1, prot) in M or w[STO] >> (n + 1) & 1):
                        fail = max([m[4] for m in votes] + [0])
                        fz = max([m[5] for m in votes] + [w[FZ]])
                        W2 = self.up(W, i, (STO, self.store(w[STO], n + 1)))
                        if r == 0:
                            M2 = M | {("R", g, n, 0, "a" if fail else "c", fz)}
                            if fail:
                                W2 = self.up(W2, i, (PH, "B"))
                            else:
                                W2, M2 = self.committed(W2, i, fz, M2)
                            yield f"worker {i} (root) combines the votes of step {n}: {'abort' if fail else 'commit'}{' + freeze' if fz else ''}", (W2, A, cur, pend, M2, F), False
                        else:
                            yield f"worker {i} (rank {r}) votes {'failed' if fail else 'ok'} for step {n}", (self.up(W2, i, (PH, "V")), A, cur, pend, M | {("V", g, n, r, fail, fz)}, F), False
                if "FASTFAIL" in rules and ph in "CG":
                    bad = next((m for m in M if m[0] == "V" and m[1] == g and m[2] == n and m[3] in self.kids[r] and m[4]), None)
                    if bad and r == 0:
                        yield f"worker {i} (root) hears failed: announces abort of step {n} at once", (self.up(W, i, (PH, "B")), A, cur, pend, M | {("R", g, n, 0, "a", 0)}, F), False
                    elif bad:
                        yield f"worker {i} (rank {r}) passes failed on for step {n}", (self.up(W, i, (PH, "F")), A, cur, pend, M | {("V", g, n, r, 1, 0)}, F), False
                    for m in M:
                        if m[0] == "R" and m[1] == g and m[2] == n and m[4] == "a" and r and m[3] == self.parent[r]:
                            yield f"worker {i} (rank {r}) hears abort of step {n} before it voted", (self.up(W, i, (PH, "B")), A, cur, pend, M | {("R", g, n, r, "a", 0)}, F), False
                if ph in ("VF" if cut else "VFH") and r:
                    for m in M:
                        if m[0] == "R" and m[1] == g and m[2] == n and m[3] == self.parent[r]:
                            M2 = M | {("R", g, n, r, m[4], m[5])} if self.kids[r] else M
                            if m[4] == "a":
                                W2 = self.up(W, i, (PH, "B"))
                            elif ph == "H":
                                W2 = self.up(W, i, (PH, "B"), (AP, n + 1), (BAD, 1 if self.opt else w[BAD]))
                            else:
                                W2, M2 = self.committed(W, i, m[5], M2)
                            late = " LATE, after it answered the mover" if ph == "H" else ""
                            yield f"worker {i} (rank {r}) receives the result of step {n}: {'commit' if m[4] == 'c' else 'abort'}{late}", (W2, A, cur, pend, M2, F), False
                if ph == "O" and all(W[x][GEN] == g and (W[x][AP] > n or (W[x][AP] == n and W[x][PH] == "O")) for x in a):
                    W2, M2 = self.applied(W, i, w[FZ], M)
                    yield f"worker {i} (rank {r}) completes the collectives after the vote of step {n}", (W2, A, cur, pend, M2, F), False
                if self.exits and ph == "D" and ("EXIT" not in rules or all(("N", g, x) in M for x in a)):
                    yield f"worker {i} (rank {r}) leaves the job with exit code 0", (self.up(W, i, (ST, "e")), A, cur, pend, M, F), False
                if F[GLITCH] and ph in "CG":
                    F2 = F[:GLITCH] + (F[GLITCH] - 1,) + F[GLITCH + 1:]
                    if r == 0:
                        yield f"GLITCH: a link of worker {i} (root) breaks; it announces abort of step {n}", (self.up(W, i, (PH, "B")), A, cur, pend, M | {("R", g, n, 0, "a", 0)}, F2), True
                    else:
                        yield f"GLITCH: a link of worker {i} (rank {r}) breaks; it votes failed for step {n}", (self.up(W, i, (PH, "F")), A, cur, pend, M | {("V", g, n, r, 1, 0)}, F2), True
            # ---- collect
            for m in M:
                if m[0] == "Q" and (i in A[m[1] - 1] or i == self.giver(M, m[1])) and g < m[1] and not (promise and w[PR] > m[1]):
                    g2, k = m[1], m[2]
                    if any(x[0] == "A" and x[1] == g2 and x[2] == k and x[3] == i for x in M):
                        continue
                    ch = [(PR, max(w[PR], g2))]
                    st = {"S": "s", "V": "h", "H": "h"}.get(ph, "-")
                    ap = n
                    if ph in "CGF" and g:
                        ch += [(PH, "P")]
                    elif ph == "V":
                        ch += [(PH, "H")]
                    elif ph == "O":
                        knows = self.opt == "zero" or "TAIL" in rules
                        ap, st = n + 1, "x" if knows else "-"
                        ch += [(PH, "B"), (AP, n + 1), (BAD, 2 if knows else 1), (FZ, 0)]
                    if w[BAD] == 2:
                        st = "x"
                    word = {"s": "empty", "h": f"holding step {n}", "-": f"{ap} steps committed", "x": f"{ap} committed, dirty"}[st]
                    yield f"worker {i} answers collect(g{g2}, mover attempt {k}): {word}", (self.up(W, i, *ch), A, cur, pend, M | {("A", g2, k, i, ap, st)}, F), False
                # ---- obey
                if m[0] == "D" and (i in A[m[1] - 1] or i == self.giver(M, m[1])) and g < m[1]:
                    g2, T = m[1], m[3]
                    if promise and w[PR] != g2:
                        continue
                    if (g or ph == "R") and ph in "PHBZRD" and not (ph == "R" and w[RD] >= g2):
                        if n == T:
                            clean = 0 if w[BAD] == 2 else 1
                            yield f"worker {i} obeys g{g2}: target {T} steps; drops its open step", (self.up(W, i, (PH, "R"), (RD, g2), (EX, T), (FZ, 0), (STO, w[STO] & (2 << T) - 1)), A, cur, pend, M | {("OK", g2, i, clean, T)}, F), False
                        elif n == T - 1 and ph == "H":
                            bad = w[BAD]
                            if self.opt:
                                bad = 2 if ("DIRTYACK" in rules and (self.opt == "zero" or "TAIL" in rules)) else 1
                            yield f"worker {i} obeys g{g2}: commits step {n}", (self.up(W, i, (PH, "R"), (RD, g2), (AP, T), (BAD, bad), (FZ, 0), (STO, w[STO] & (2 << T) - 1)), A, cur, pend, M | {("OK", g2, i, 0 if bad == 2 else 1, T)}, F), False
                        else:
                            raise Violation(f"worker {i} has applied {n} steps (state {ph}) and is told by g{g2} to be at {T}")
                    # an empty joiner, or a rank that knows it is dirty, pulls from a clean donor
                    if (ph == "S" and not g) or (ph == "R" and w[RD] == g2 and w[BAD] == 2):
                        a2 = A[g2 - 1]
                        r2 = a2.index(i)
                        lv = self.giver(M, g2)
                        donor = next((x for x in (lv, *a2) if x >= 0 and x != i and ("OK", g2, x, 1, T) in M and W[x][ST] == "u" and W[x][PH] == "R" and W[x][RD] == g2), None)
                        if ph == "S":
                            bx, px = a2[(r2 + 1) % 3], a2[(r2 - 1) % 3]
                            if lv >= 0 and W[lv][ST] == "u" and W[lv][STO] >> T & 1 and lv in (x[(r2 + 1) % 3] for x in A[:g2 - 1]):
                                bx = lv
                            if W[bx][ST] == "u" and (W[bx][PH] == "S" or (W[bx][PH] == "R" and W[bx][RD] == g2 and not W[bx][STO] >> T & 1)):
                                if g2 == cur and ("SNAP", g2) not in M:
                                    yield f"extras of rank {r2} at {T} are lost: its buddy's worker {bx} holds none", (W, A, cur, pend, M | {("SNAP", g2)}, F), False
                                continue
                            if donor is None or W[bx][ST] != "u" or not (W[bx][PH] == "R" and W[bx][RD] == g2):
                                continue
                            sto = 0
                            if "REBUDDY" in rules:
                                if not (W[px][ST] == "u" and W[px][PH] == "R" and W[px][RD] == g2):
                                    if not (W[px][ST] == "u" and W[px][PH] == "S"):
                                        continue
                                else:
                                    sto = 1 << T
                            yield f"joiner {i} (rank {r2}) pulls state {T} from worker {donor} and extras {T} from worker {bx}", (self.up(W, i, (PH, "R"), (RD, g2), (AP, T), (EX, T), (BAD, W[donor][BAD]), (STO, sto)), A, cur, pend, M | {("OK", g2, i, 1, T)}, F), False
                        elif donor is not None:
                            yield f"dirty worker {i} pulls state {T} from worker {donor}", (self.up(W, i, (BAD, W[donor][BAD])), A, cur, pend, (M - {("OK", g2, i, 0, T)}) | {("OK", g2, i, 1, T)}, F), False
                # ---- resume
                if m[0] == "S" and i in A[m[1] - 1] and g < m[1]:
                    g2, T = m[1], m[2]
                    crash = ph == "R" and w[RD] == g2 and (not promise or w[PR] in (g2, 0) or w[PR] < g2)
                    if crash:
                        if w[BAD]:
                            raise Violation(f"worker {i} resumes in g{g2} with wrong tracked state (it never learnt it was dirty, or its donor was)")
                        if n != T or w[EX] != n:
                            raise Violation(f"worker {i} resumes in g{g2} at step {n} with extras {w[EX]}, others start at {T}")
                        ph2 = "C" if n < self.N else "D"
                        M2 = M | {("N", g2, i)} if self.exits and ph2 == "D" else M
                        yield f"worker {i} resumes in g{g2} at step {n}", (self.up(W, i, (GEN, g2), (PH, ph2), (FZ, 0)), A, cur, pend, M2, F), False
                # ---- planned migration: freeze and its abort
                if m[0] == "F" and g and g < m[1] and ph in "CG" and not w[FZ] and i in A[cur - 1] and not ("REMEMBER" in rules and w[AB] >= m[1]) and not (promise and w[PR] > m[1]):
                    yield f"worker {i} hears freeze for g{m[1]}: sets the flag in its next vote", (self.up(W, i, (FZ, m[1])), A, cur, pend, M, F), False
                if m[0] == "E" and w[AB] < m[1] and g < m[1] and not (promise and w[PR] >= m[1]):
                    ch = [(AB, m[1])]
                    if ph == "Z" and w[FZ] <= m[1]:
                        ch += [(FZ, 0), (PH, "C" if n < self.N else "D")]
                    elif 0 < w[FZ] <= m[1]:
                        ch += [(FZ, 0)]
                    yield f"worker {i} hears that the migration to g{m[1]} is aborted", (self.up(W, i, *ch), A, cur, pend, M, F), False
            # ---- faults
            calm = not self.seq or all(W[x][ST] == "u" and W[x][GEN] == cur and W[x][PH] in "CGVO" for x in A[cur - 1])
            if F[CRASH] and calm and g + w[RD] + w[PR] + (1 if i in A[cur - 1] or (pend and i in A[pend - 1]) else 0):
                yield f"CRASH of worker {i} (state {ph}, {n} applied)", (self.up(W, i, (ST, "d")), A, cur, pend, M, F[:CRASH] + (F[CRASH] - 1,) + F[CRASH + 1:]), True
            if F[SUSPECT] and i in A[cur - 1] and g and not F[SUSBITS] >> i & 1:
                yield f"WRONG SUSPICION: worker {i} is alive but declared failed", (W, A, cur, pend, M, F[:SUSPECT] + (F[SUSPECT] - 1,) + F[SUSPECT + 1:SUSBITS] + (F[SUSBITS] | 1 << i,)), True
            if F[REJOIN] and F[SUSBITS] >> i & 1 and i not in A[cur - 1]:
                F2 = F[:REJOIN] + (F[REJOIN] - 1,) + (F[SUSBITS] & ~(1 << i),)
                ch = ((GEN, 0), (PH, "S"), (AP, 0), (EX, 0), (PR, 0), (RD, 0), (BAD, 0), (STO, 0), (FZ, 0)) if "RESET" in rules else ((PH, "B"), (FZ, 0))
                yield f"zombie {i} comes back as a standby{'' if 'RESET' in rules else ', with what it has'}", (self.up(W, i, *ch), A, cur, pend, M, F2), True

        # ---- planner
        a = A[cur - 1]
        lost = [x for x in a if W[x][ST] == "d" or F[SUSBITS] >> x & 1]
        free = [x for x in range(len(W)) if W[x][ST] == "u" and x not in a and (W[x][PH] == "S" or (W[x][PH] == "B" and "RESET" not in rules)) and not F[SUSBITS] >> x & 1]
        relink = "RELINK" in rules and not lost and not pend and any(W[x][ST] == "u" and W[x][PH] == "B" and W[x][GEN] == cur and W[x][PR] <= cur for x in a)
        finished = any(all(("N", k, x) in M for x in b) for k, b in enumerate(A, 1))
        if (lost and len(free) >= len(lost) or relink) and not finished:
            back = self.giver(M, cur)
            if back >= 0 and W[back][ST] == "u" and not F[SUSBITS] >> back & 1:
                lost = [x for x in lost if x != a[self.leaver]]  # its joiner may be dead or not
                sub = {a[self.leaver]: back, **dict(zip(lost, free))}
            else:
                sub = dict(zip(lost, free))
            b = tuple(sub.get(x, x) for x in a)
            g2 = len(A) + 1
            what = ", ".join(f"{x} -> {y}" for x, y in sub.items()) or "no leaver"
            yield f"planner: migration.planned g{g2} ({what}); mover asks all members", (W, A + (b,), g2, 0, M | {("Q", g2, 1)}, F), False
        if F[PLANNED] and not lost and free and not pend and all(W[x][GEN] == cur and W[x][ST] == "u" for x in a):
            b = tuple(free[0] if j == self.leaver else x for j, x in enumerate(a))
            g2 = len(A) + 1
            yield f"planner: planned migration g{g2} ({a[self.leaver]} -> {free[0]}); mover requests freeze", (W, A + (b,), cur, g2, M | {("F", g2)}, F[:PLANNED] + (F[PLANNED] - 1,) + F[PLANNED + 1:]), True
        # ---- mover, planned
        if pend:
            frozen = {m[2]: m[3] for m in M if m[0] == "Y" and m[1] == pend}
            begun = any(m[0] == "D" and m[1] == pend for m in M)
            if all(x in frozen for x in a) and not begun:
                if len(set(frozen.values())) > 1:
                    raise Violation(f"ranks froze for g{pend} at different steps {frozen}")
                M2 = M | {("L", pend, a[self.leaver]), ("Q", pend, 1), ("D", pend, 1, frozen[a[0]])}
                if "WAL" in rules:
                    yield f"mover: all are frozen; migration.decided g{pend} is durable, then collect and the decision to all", (W, A, pend, 0, M2, F), False
                else:
                    yield f"mover: all are frozen; sends collect and the decision for g{pend}", (W, A, cur, pend, M2, F), False
            if begun:
                yield f"mover: publishes migration.decided g{pend}", (W, A, pend, 0, M, F), False
            if not begun or F[MRESTART]:
                F2 = F[:MRESTART] + (F[MRESTART] - 1,) + F[MRESTART + 1:] if begun else F
                yield f"mover: {'restarted, does not know that it began; ' if begun else ''}deadline, aborts g{pend}", (W, A, cur, 0, M | {("E", pend)}, F2), bool(begun)
        # ---- mover, crash path
        ks = [m[2] for m in M if m[0] == "Q" and m[1] == cur]
        if ks:
            started = any(m[0] == "S" and m[1] == cur for m in M)
            if F[MOVER] and not started:
                k = max(ks) + 1
                yield f"MOVER restarts or a second one starts: asks again for g{cur} (attempt {k})", (W, A, cur, pend, M | {("Q", cur, k)}, F[:MOVER] + (F[MOVER] - 1,) + F[MOVER + 1:]), True
            for k in ks:
                if any(m[0] == "D" and m[1] == cur and m[2] == k for m in M):
                    continue
                ans = {m[3]: m for m in M if m[0] == "A" and m[1] == cur and m[2] == k}
                full = [m for m in ans.values() if m[5] != "s"]
                need = [x for x in a if W[x][ST] != "e"]
                if full and (all(x in ans for x in need) if "ALL" in rules else True):
                    T = max(m[4] for m in full)
                    yield f"mover (attempt {k}) decides for g{cur} from workers {sorted(ans)}: target {T} steps", (W, A, cur, pend, M | {("D", cur, k, T)}, F), False
            oks = {m[2]: m for m in M if m[0] == "OK" and m[1] == cur and m[3]}
            have = [oks[x] for x in a if x in oks]
            if not started and have and all(x in oks or (W[x][ST] == "e" and have[0][4] == self.N) for x in a):
                if len({m[4] for m in have}) > 1:
                    raise Violation(f"members of g{cur} are ready at different steps {sorted({m[4] for m in have})}")
                yield f"mover: all ready, resume in g{cur}", (W, A, cur, pend, M | {("S", cur, have[0][4])}, F), False

    # ---------------------------------------------------------------- end states
    def verdict(self, s):
        """Name of an end state without normal transitions, or None if it is an unnamed deadlock."""
        W, A, cur, pend, M, F = s
        a = A[cur - 1]
        if all((W[x][ST] == "e" or W[x][PH] == "D") and W[x][AP] == self.N for x in a):
            if any(W[x][BAD] for x in a):
                raise Violation("job completed with wrong tracked state")
            return "completed"
        if any(all(("N", g, x) in M for x in b) for g, b in enumerate(A, 1)):
            return "completed"  # every rank of one generation had finished; a later plan is moot
        if ("SNAP", cur) in M:
            return "needs a snapshot: extras lost with rank and buddy"
        live = [x for x in a if W[x][ST] == "u" and W[x][PH] != "S"]
        lost = [x for x in a if W[x][ST] == "d" or F[SUSBITS] >> x & 1]
        free = [x for x in range(len(W)) if W[x][ST] == "u" and x not in a and W[x][PH] == "S" and not F[SUSBITS] >> x & 1]
        if len(lost) > len(free):
            return "stalled: no standby"
        if not live:
            return "needs a snapshot: no survivor"
        if live and all(W[x][BAD] == 2 for x in live):
            return "needs a snapshot: no clean donor"
        return None


def check(model, allow=("completed",), deadlocks=True, limit=6_000_000, seconds=900):
    """BFS; returns (number of states, ends, violation text or None, trace, state); deadlocks=False looks for wrong states only."""
    t0 = time.time()
    init = model.initial()
    seen = {init: 0}
    order, back = [init], [(-1, "")]
    queue = deque([0])
    ends = {}

    def trace(i, *more):
        out = []
        while i > 0:
            i, label = back[i]
            out.append(label)
        return out[::-1] + [m for m in more if m]

    while queue:
        i = queue.popleft()
        s = order[i]
        moved = False
        try:
            for label, t, fault in model.successors(s):
                if t == s:
                    continue
                moved |= not fault
                t = model.gc(t)
                if t not in seen:
                    seen[t] = len(order)
                    order.append(t)
                    back.append((i, label))
                    queue.append(seen[t])
            if not moved:
                name = model.verdict(s)
                if name is None:
                    if not deadlocks:
                        continue
                    return len(order), ends, "deadlock without a named cause", trace(i), s
                if not name.startswith(allow) and deadlocks:
                    return len(order), ends, f"a fault that should cost no step: {name}", trace(i), s
                ends[name] = ends.get(name, 0) + 1
        except Violation as v:
            return len(order), ends, str(v), trace(i), s
        if len(order) > limit or (len(order) % 1000 == 0 and time.time() - t0 > seconds):
            return len(order), ends, "INCOMPLETE (limit)", [], s
    return len(order), ends, None, [], None


ANY = ("completed", "stalled", "needs")
# name, what it is, model arguments, permitted ends, rules whose absence is tried one at a time
SCENARIOS = [
    ("one-crash", "one crash anywhere, vote result partially delivered", dict(crash=1), ("completed",), ("KEEP2", "CUT", "REBUDDY")),
    ("chain", "the same, vote tree a chain (an inner node forwards)", dict(crash=1, chain=True), ("completed",), ("KEEP2", "CUT")),
    ("two-crashes", "two crashes anywhere, also during recovery; 2 standbys", dict(crash=2, standbys=2), ANY, ("CUT", "PROMISE", "PROMISE!")),
    ("one-standby", "two crashes, 1 standby (must end completed, or stalled with the cause)", dict(crash=2, standbys=1), ANY, ()),
    ("one-then-one", "a second crash after the first recovery is complete; 2 standbys", dict(crash=2, standbys=2, seq=True, steps=3), ("completed",), ("REBUDDY",)),
    ("zombie", "one healthy rank declared failed while it votes or commits, plus one crash", dict(crash=1, suspect=1, standbys=2), ANY, ("CUT", "PROMISE")),
    ("no-answer", "a member does not answer in time and the mover decides without it", dict(crash=1), ("completed",), ("ALL",)),
    ("two-movers", "mover restarts or is doubled (asks again, old decisions still under way), plus one crash", dict(crash=1, mover=1), ("completed",), ("CUT", "PROMISE")),
    ("two-movers+crash", "the same with a second crash during recovery, 1 step", dict(crash=2, mover=1, standbys=2, steps=1), ANY, ("CUT", "PROMISE", "PROMISE!")),
    ("zero", "optimizer with collectives inside, one crash", dict(crash=1, opt="zero"), ANY, ("DIRTYACK",)),
    ("tail", "collective after the optimizer that feeds state (scheduler on mean loss), one crash", dict(crash=1, opt="tail"), ANY, ("TAIL", "DIRTYACK")),
    ("exit", "workers exit after the last step, one crash", dict(crash=1, exits=True), ("completed",), ("EXIT",)),
    ("glitch", "one link breaks, nobody is dead: the vote says abort", dict(glitch=1), ("completed",), ("FASTFAIL", "RELINK")),
    ("glitch+crash", "a link breaks and one worker crashes", dict(glitch=1, crash=1), ("completed",), ("FASTFAIL", "RELINK")),
    ("freeze", "planned switch that may be aborted at any time", dict(planned=1), ("completed",), ("REMEMBER",)),
    ("freeze+crash", "planned switch and one crash (leaver, joiner or stayer), 2 standbys", dict(planned=1, crash=1, standbys=2), ("completed",), ("REMEMBER", "PROMISE")),
    ("switch+mover", "planned switch, mover restarts between its first command and migration.decided", dict(planned=1, mrestart=1), ("completed",), ("WAL",)),
    ("switch+mover+crash", "the same and one crash, 2 standbys", dict(planned=1, mrestart=1, crash=1, standbys=2), ("completed",), ()),
    ("exit, two crashes", "workers exit after the last step, two crashes, 2 standbys", dict(crash=2, exits=True, standbys=2), ANY, ()),
    ("zero, two crashes", "optimizer with collectives inside, two crashes, 2 standbys", dict(crash=2, opt="zero", standbys=2), ANY, ()),
    ("zero+freeze", "the same optimizer, planned switch and one crash", dict(crash=1, planned=1, opt="zero", standbys=2), ANY, ()),
    ("rejoin", "zombie comes back as a standby and is used again", dict(suspect=1, rejoin=1, crash=1, standbys=1), ANY, ("RESET",)),
    ("run-ahead", "steps without data dependency (local SGD), one crash", dict(crash=1, independent=True), ("completed",), ("XKNOW",)),
]


def main(names):
    total, broken = time.time(), 0
    print(__doc__.split("\n")[0], "\n")
    for name, what, args, allow, ablate in SCENARIOS:
        if names and name not in names:
            continue
        print(f"== {name}: {what}")
        for drop in (None, *ablate):
            drop, wrong = (drop[:-1], True) if drop and drop.endswith("!") else (drop, False)
            rules = tuple(r for r in ALLRULES if r != drop)
            t0 = time.time()
            n, ends, bad, path, _ = check(Model(rules=rules, **args), allow, deadlocks=not wrong)
            head = "all rules" if drop is None else f"without {drop}" + (" *" if wrong else "")
            took = f"{n:,} states, {time.time()-t0:.0f} s"
            if bad is None:
                print(f"   {head:<18} HOLDS   ({took}); ends: " + "; ".join(f"{k}: {v}" for k, v in sorted(ends.items())))
            else:
                broken += drop is None
                print(f"   {head:<18} BROKEN  ({took}): {bad}")
                for step, label in enumerate(path, 1):
                    print(f"        {step:2}. {label}")
            sys.stdout.flush()
    print(f"\n{broken} scenario(s) broken with all rules on; {time.time()-total:.0f} s in all")


if __name__ == "__main__":
    main(sys.argv[1:])
