"""Metrics over all rows of all micro-batches, each with a standard error that does not depend on the cut."""

from augend.metrics._estimate import Estimate
from augend.metrics._metric import Metric
from augend.metrics._metrics import Accuracy, Mean, Perplexity

__all__ = ["Accuracy", "Estimate", "Mean", "Metric", "Perplexity"]
