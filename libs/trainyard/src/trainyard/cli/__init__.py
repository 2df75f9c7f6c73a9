"""The command `yard`.

`main` is the entry; `app` names the commands; each module in `commands` holds a few of them and imports what it needs
when it runs, because most of the time of a short command is imports.
"""
