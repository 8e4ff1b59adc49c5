"""Which implementation runs a step. The choice is explicit: asking for one that cannot serve is an error."""

from __future__ import annotations

BACKENDS = ("xla",)


def resolve_backend(backend: str) -> str:
    """The backend that serves a request for `backend`; "auto" takes the fastest there is.

    Raises: ValueError that names the backends there are.
    """
    if backend == "auto":
        return "xla"
    if backend not in BACKENDS:
        allowed = ", ".join(map(repr, ("auto", *BACKENDS)))
        raise ValueError(f"backend = {backend!r}: this version has {allowed}")
    return backend
