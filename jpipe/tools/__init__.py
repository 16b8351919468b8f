"""Tools on top of the pipeline: what a step costs, predicted and measured, which settings to take; pictures, the page.

No folder of the core imports it, but methods that open a tool (`Timeline.plot`, `pipe.view`). The page, `page.html`, is
one file that needs no network; matplotlib is imported only to draw.
"""
