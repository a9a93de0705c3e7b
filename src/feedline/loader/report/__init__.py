"""What the spans mean: totals, a verdict in words, and exporters. Pure: nothing here reads, writes or waits."""

from feedline.loader.report.stats import Context, StageTimes, Stats, Totals
from feedline.loader.report.verdict import Verdict, diagnose

__all__ = ["Context", "StageTimes", "Stats", "Totals", "Verdict", "diagnose"]
