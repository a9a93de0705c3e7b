"""What the spans mean: totals, a verdict in words, and exporters. Pure: nothing here reads, writes or waits."""

from feedline.diagnose.figures import Context
from feedline.diagnose.totals import StageTimes, Stats, Totals
from feedline.diagnose.verdict import Verdict, diagnose

__all__ = ["Context", "StageTimes", "Stats", "Totals", "Verdict", "diagnose"]
