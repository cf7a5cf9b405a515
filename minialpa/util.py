"""Conveniences under Alpa's names."""

from minialpa.support.progress import disable_progress


def disable_tqdm_globally() -> None:
    """Show no more progress in this process."""
    disable_progress()
