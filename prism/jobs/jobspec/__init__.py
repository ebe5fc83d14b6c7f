"""What a job file may say: its blocks, layers of files, checks, and messages with file and line.

`prism.jobs.job` puts it together; nothing else should be needed from outside but types of blocks.
"""
