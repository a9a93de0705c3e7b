"""Reports from spans: totals, a verdict with predicted gains, exporters.

All functions are pure.
"""

from feedline.loader.report.advice import Advice
from feedline.loader.report.context import Context
from feedline.loader.report.stats import SlowBatch, StageTimes, Stats
from feedline.loader.report.totals import Totals
from feedline.loader.report.verdict import Verdict, diagnose

__all__ = ["Advice", "Context", "SlowBatch", "StageTimes", "Stats", "Totals", "Verdict", "diagnose"]
