"""The commands, a module each; `prism.cli.app` has the list.

A command reads its options, calls what a notebook would call, and prints what it returns. Imports
of anything slow stand inside the functions, so that ``prism --help`` is instant.
"""
