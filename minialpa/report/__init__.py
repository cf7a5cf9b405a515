"""A plan goes in; one screen of text, a page of HTML, and findings come out. Nothing here plans or runs."""
