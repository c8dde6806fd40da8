"""The page's own parts: `page.html` with its style and scripts, put together by `report.page`."""
