"""Configurations of other tools read into jobs: settings with their lines, then blocks of a job.

`prism.jobs.importing.imported` puts it together. What their names mean is
`prism.jobs.jobspec.othernames`, the one table of them.
"""
