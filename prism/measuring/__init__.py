"""Parts of `prism measure`: what is run, how it is timed, what is learnt from it.

`prism.measuring.command` is their front. Torch is imported only where something is run
(`machine.load_torch`), so that everything else, samples read back included, works without it.
"""

# modules that rooms above may import
FACE = (
    "collectives", "command",
)  # fmt: skip
