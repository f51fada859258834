"""Faults on purpose, for rehearsals: see `fail_at`, and the environment variable ``PIPEWORK_FAULT``."""

from pipework.processes.faults import (
    ACTIONS,
    KINDS,
    VARIABLE,
    Fault,
    InjectedFault,
    current_attempt,
    fail_at,
    faults_from_environment,
)

__all__ = [
    "ACTIONS",
    "KINDS",
    "VARIABLE",
    "Fault",
    "InjectedFault",
    "current_attempt",
    "fail_at",
    "faults_from_environment",
]
