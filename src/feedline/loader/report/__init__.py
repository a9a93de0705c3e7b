"""Reports from spans: totals, a verdict in words, and exporters.

All functions are pure.
"""

from feedline.loader.report.stats import Context, SlowBatch, StageTimes, Stats
from feedline.loader.report.totals import Totals
from feedline.loader.report.verdict import Verdict, diagnose

__all__ = ["Context", "SlowBatch", "StageTimes", "Stats", "Totals", "Verdict", "diagnose"]
