"""Where rows come from, in which order, and how far a run is in them."""

from augend.data._batch import Batch as Batch
from augend.data._batch import Microbatch as Microbatch
from augend.data._batches import Batches as Batches
from augend.data._pad import pad as pad
from augend.data._position import Progress as Progress
from augend.data._split import Part as Part
from augend.data._split import split as split

__all__ = ["Batch", "Batches", "Microbatch", "Part", "Progress", "pad", "split"]
