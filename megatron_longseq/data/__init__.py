"""Corpora for long sequences: reading text, tokenising it, writing and checking Megatron's format.

* ``documents``, ``standard_library``  inputs -> documents
* ``tokenizer``  documents -> token ids: bytes, or any text tokenizer that Megatron builds
* ``pool``       the same in several processes, in the same order
* ``writer``     token ids -> ``PREFIX.bin`` and ``PREFIX.idx``, through Megatron's own builder
* ``sidecar``    ``PREFIX.json``: what the corpus was made of and with which tokenizer
* ``prepare``    all of it: inputs to a corpus
* ``corpus``, ``splits``  checks of an existing corpus against the flags of a training run

Only ``tokenizer`` and ``writer`` know Megatron, and they import it inside functions: importing it
takes seconds, and most mistakes in an input can be told before.
"""
