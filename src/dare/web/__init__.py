"""The playground: a page on which merges can be tried, and the local server behind it.

The page is the same with and without a server. `page/` holds the files that the browser gets
unchanged, `templates/` the parts that the page is made of; `assets` lists all of them.
"""
