"""What a run of tests starts and makes on this machine goes with it, however the run ends.

`run` begins and ends a run and notes what has to be cleaned up, `reaper` is the process that does it, and `journal` is
what both of them write and read. `groups` is the control group of a run, `processes` finds what is not in one, and
`folders` removes and tidies the temporary folders.
"""
