"""A page that shows where a pipeline's time and memory go: any pipeline's (`jpipe view`), or one's own (`pipe.view()`).

`page.html` is all that it shows: one file without a network, whose JavaScript follows `jpipe.schedules` line by line; a
test holds its numbers equal to `jpipe.simulate`'s.
"""
