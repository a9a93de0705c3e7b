"""Reports from spans: totals, a verdict with predicted gains, exporters.

All functions are pure, except `context.context_of`, which reads the loader and the machine.
"""

from feedline.loader.report.context import Context, context_of
from feedline.loader.report.remedy import Advice
from feedline.loader.report.stats import SlowBatch, StageTimes, Stats
from feedline.loader.report.totals import Totals
from feedline.loader.report.verdict import Verdict, diagnose

__all__ = ["Advice", "Context", "SlowBatch", "StageTimes", "Stats", "Totals", "Verdict", "context_of", "diagnose"]
