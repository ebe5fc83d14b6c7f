"""The commands, a module each or one for those that share their options; `prism.cli` has the list.

A command reads its options, calls what a notebook would call, and prints what it returns. Imports
of anything slow stand inside the functions, so that ``prism --help`` is instant.
"""
