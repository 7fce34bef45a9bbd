//! Opening the files that a user names for a machine.
