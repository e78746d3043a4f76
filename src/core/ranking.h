// Ranks within rows.
