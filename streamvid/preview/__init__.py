"""Web page and static report that show a dataset as the model sees it.

The package imports the loader, the plan and the forecast, and nothing imports it except the command line. Reading
order: find (location of a sample), sample (its index row), browse (pages of rows), deliver (frames), steps, runs, then
report and extract, and web/ for the server.
"""
