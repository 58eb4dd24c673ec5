"""The report of a compressed model, tables and figures."""

from gistkit.report.plots import canvas, frame, plot_errors, plot_profile
from gistkit.report.profile_view import LayerProfile, Profile, profile_tables, told
from gistkit.report.step_report import CompiledReport, Report, report
from gistkit.report.tables import console, hundredths, mib, milliseconds, rendered, table
