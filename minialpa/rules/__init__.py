"""An equation in, its `Factors` out: the dimensions of its arrays that are split together. See README.md."""
