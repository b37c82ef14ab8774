package lancewal;

import java.io.IOException;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.types.StructType;

/**
 * Reads one row ahead. A query with a limit stops at its last row, and Spark ends a Python worker whose
 * output was not read to the end; the next task would have to start another one and import everything.
 */
record ReadToTheEnd(Batch batch, StructType columns) implements Batch {
  @Override
  public InputPartition[] planInputPartitions() {
    return batch.planInputPartitions();
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return new Factory(batch.createReaderFactory(), columns);
  }

  private record Factory(PartitionReaderFactory factory, StructType columns)
      implements PartitionReaderFactory {
    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
      return new Reader(factory.createReader(partition), UnsafeProjection.create(columns));
    }
  }

  private static final class Reader implements PartitionReader<InternalRow> {
    private final PartitionReader<InternalRow> rows;
    private final UnsafeProjection projection;
    private boolean started;
    private InternalRow shown;
    private InternalRow ahead;

    Reader(PartitionReader<InternalRow> rows, UnsafeProjection projection) {
      this.rows = rows;
      this.projection = projection;
    }

    @Override
    public boolean next() throws IOException {
      if (!started) {
        started = true;
        ahead = fetched();
      }
      shown = ahead;
      ahead = shown == null ? null : fetched();
      return shown != null;
    }

    /** A copy: Spark shows all rows of a batch through one object, whose own copy() fails on null items. */
    private InternalRow fetched() throws IOException {
      return rows.next() ? projection.apply(rows.get()).copy() : null;
    }

    @Override
    public InternalRow get() {
      return shown;
    }

    @Override
    public CustomTaskMetric[] currentMetricsValues() {
      return rows.currentMetricsValues();
    }

    @Override
    public void close() throws IOException {
      rows.close();
    }
  }
}
