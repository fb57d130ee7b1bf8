"""The report: a build, and perhaps a run of it, as one page that needs no network."""
