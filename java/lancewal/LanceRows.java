package lancewal;

import java.io.ByteArrayInputStream;
import java.io.IOException;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.vector.VectorSchemaRoot;
import org.apache.arrow.vector.ipc.ArrowStreamReader;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.ArrowUtils;
import org.apache.spark.sql.vectorized.ArrowColumnVector;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * The rows of a small read, which came with its plan as an Arrow stream. One task shows them as they are:
 * no Python worker is asked, and no row is converted.
 */
record LanceRows(StructType readSchema, byte[] stream, String description) implements Scan, Batch {
  @Override
  public Batch toBatch() {
    return this;
  }

  @Override
  public ColumnarSupportMode columnarSupportMode() {
    return ColumnarSupportMode.SUPPORTED;
  }

  @Override
  public InputPartition[] planInputPartitions() {
    return new InputPartition[] {new Rows(stream)};
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return new Factory();
  }

  private record Rows(byte[] stream) implements InputPartition {}

  private record Factory() implements PartitionReaderFactory {
    @Override
    public boolean supportColumnarReads(InputPartition partition) {
      return true;
    }

    @Override
    public PartitionReader<ColumnarBatch> createColumnarReader(InputPartition partition) {
      return new Reader(((Rows) partition).stream());
    }

    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
      throw new UnsupportedOperationException("read in columns");
    }
  }

  private static final class Reader implements PartitionReader<ColumnarBatch> {
    private final BufferAllocator allocator =
        ArrowUtils.rootAllocator().newChildAllocator("lancewal rows", 0, Long.MAX_VALUE);
    private final ArrowStreamReader rows;

    Reader(byte[] stream) {
      rows = new ArrowStreamReader(new ByteArrayInputStream(stream), allocator);
    }

    @Override
    public boolean next() throws IOException {
      return rows.loadNextBatch();
    }

    @Override
    public ColumnarBatch get() {
      try {
        VectorSchemaRoot loaded = rows.getVectorSchemaRoot();
        ColumnVector[] columns =
            loaded.getFieldVectors().stream().map(ArrowColumnVector::new).toArray(ColumnVector[]::new);
        return new ColumnarBatch(columns, loaded.getRowCount());
      } catch (IOException error) {
        throw Refusals.sneaky(error);
      }
    }

    @Override
    public void close() throws IOException {
      rows.close();
      allocator.close();
    }
  }
}
