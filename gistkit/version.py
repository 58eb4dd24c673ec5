"""The version: packaging reads it here too, so that a checkout that is not installed knows it as well."""

VERSION = "0.1.0"
