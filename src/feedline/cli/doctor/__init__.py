"""`feedline doctor`: checks of this machine and of a loader, with remedies."""

from feedline.cli.doctor.findings import Finding, Severity

__all__ = ["Finding", "Severity"]
