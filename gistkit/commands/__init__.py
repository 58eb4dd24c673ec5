"""The commands of ``gistkit``, one file each: ``add(subparsers)`` declares the arguments, ``run(options)`` returns the
exit status and raises :class:`gistkit.commands.wrong.InputError` for wrong input."""

from gistkit.commands.wrong import Parser, status_of
