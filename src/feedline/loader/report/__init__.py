"""Reports from spans: totals, a verdict in words, and exporters.

All functions are pure.
"""

from feedline.loader.report.context import Context
from feedline.loader.report.stats import StageTimes, Stats, Totals
from feedline.loader.report.verdict import Verdict, diagnose

__all__ = ["Context", "StageTimes", "Stats", "Totals", "Verdict", "diagnose"]
