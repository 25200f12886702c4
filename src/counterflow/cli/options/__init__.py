"""From what a user writes to what the library takes: flags, schedules by name or file, messages in flags."""
