"""The on-disk format of a dump: names, arrays, manifest, writer and reader.

Capture writes with `torchair_scope.store.run.open_run`; analysis reads with
`torchair_scope.store.reader.read`. The two meet nowhere else.
"""
