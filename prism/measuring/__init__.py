"""Parts of `prism measure`: what is run, how it is timed, what is learnt from it.

`prism.measuring.command` is their front. Torch is imported only where something is run
(`machine.load_torch`), so that everything else, samples read back included, works without it.
"""

# what rooms above may import, by module
FACE = {
    "collectives": "parse_size",
    "command": "Measurement measure samples_path",
}  # fmt: skip
