"""A plan in; one screen of text, a page of HTML, and findings out. Nothing here plans or runs."""
