"""Trace and span ids derived from the incident, so that any copy of a service writes the same.

W3C Trace Context: 16-byte trace id, 8-byte span id, `00-<trace>-<span>-01`.
"""

from hashlib import sha256

ROOT = "incident"
"""Name of the span that is the parent of all others of its trace."""


def trace_id(run: str, incident: str) -> str:
    return sha256(f"trace/{run}/{incident}".encode()).hexdigest()[:32]


def span_id(run: str, incident: str, name: str) -> str:
    return sha256(f"span/{run}/{incident}/{name}".encode()).hexdigest()[:16]


def traceparent(run: str, incident: str) -> str:
    """For messages: what others make of them hangs below the incident's root."""
    return f"00-{trace_id(run, incident)}-{span_id(run, incident, ROOT)}-01"
