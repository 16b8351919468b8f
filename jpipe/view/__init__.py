"""The page `page.html` of a pipeline's times and memory: any pipeline's (`jpipe view`), or one's own (`pipe.view()`).

The page is one file that needs no network. Its JavaScript follows `jpipe.schedules` line by line; a
test holds its numbers equal to `jpipe.simulate`'s.
"""
