"""One file a step, named by its revision; a step that was released is never changed."""
