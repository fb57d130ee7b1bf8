"""The report: a build, and a run of it, as one page that needs no network."""
