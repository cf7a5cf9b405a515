"""Small conveniences under the names that Alpa gives them."""

from minialpa.support.progress import disable_progress


def disable_tqdm_globally() -> None:
    """Show no progress bars in this process from now on."""
    disable_progress()
