package lancewal;

import org.apache.spark.sql.connector.catalog.StagedTable;

/** A table that CREATE TABLE … AS SELECT has made and fills; it is undone if that fails. */
final class Staged extends LanceTable implements StagedTable {
  private final Runnable undo;

  Staged(LanceTable made, Runnable undo) {
    super(made);
    this.undo = undo;
  }

  @Override
  public void commitStagedChanges() {}

  @Override
  public void abortStagedChanges() {
    undo.run();
  }
}
