"""What users of other pipeline systems bring, each against one plain process."""
