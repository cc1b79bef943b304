"""Metrics over all rows of all micro-batches, each with a standard error that does not depend on the cut."""

from augend.metrics._estimate import Estimate
from augend.metrics._metric import Metric
from augend.metrics._metrics import Accuracy, Mean, Perplexity
from augend.metrics._ranks import Ranks

__all__ = ["Accuracy", "Estimate", "Mean", "Metric", "Perplexity", "Ranks"]
