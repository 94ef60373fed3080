"""Moving the state of a rank: the donor registers what it holds, the puller reads it.

A read names its bytes (tensor, offset, length), so any donor may answer it and any other may when
that one dies. All donors number tensors in the order of `codec.canonical`.
"""
