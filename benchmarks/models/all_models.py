"""Every model, by name: the files are imported in the order of the table."""

from benchmarks.models import plain, frameworks, hugging_face, science  # noqa: F401, I001
from benchmarks.models.catalogue import MODELS

__all__ = ["MODELS"]
