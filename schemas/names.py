"""Names of jobs, machines and workers, checked wherever one enters."""

from typing import Annotated

from pydantic import StringConstraints

NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
"""Kubernetes' label form (RFC 1123), so that a name can be a subject token, a pod and a file."""

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""A job, machine or worker: lower-case letters, digits and inner dashes, 63 characters."""
