"""What a run is on disk: journal segments for what is new, column files for what is old, a manifest that says which.

    runs/<run id>/
        journal-00000007.log                 frames of batches, written with one fsync each; the newest segment grows
        points-00000000-00000006.parquet     points of segments 0 to 6, by (name, rank, writer, row)
        lines-00000000-00000006.parquet      lines of the same segments, by (time, writer, number)
        manifest.json                        which column files count, and the first segment that is not in them

`journal` appends to the newest segment, `frames` reads them all; `folder` opens a run and switches it atomically from
segments to column files; `columnfiles` reads column files, `compaction` makes them, in a process of its own
(`compactor`, which `worker` starts and asks); `snapshot` is how everybody else reads.
"""
