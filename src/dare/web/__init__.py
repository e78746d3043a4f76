"""The playground: a page on which merges can be tried, and the local server behind it.

The page is the same with and without a server. `page/` is what the browser gets as it lies there,
`templates/` what the page is put together from; `assets` lists all of it.
"""
