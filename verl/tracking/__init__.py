"""What a run tells about itself: metrics, transcripts, the display, times. Imports the nouns and no torch."""
