"""Web page and static report that show a dataset as the model sees it.

The package imports the loader, the plan and the forecast, and nothing imports it except the command line. Reading
order: find (where a sample is), sample (its facts), browse (pages of rows), deliver (its frames), steps, runs, then
report and extract, and web/ for the server.
"""
