package lancewal;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.util.Arrays;
import java.util.Set;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/**
 * Lists of numbers, as vectors are, which Python packs as a Spark row holds them. Spark would convert each item
 * of a list by itself, thirty million of them in 30,000 rows of 1024.
 *
 * <p>Spark's Python reader is told that such a column is binary. In an {@link UnsafeRow} a binary value and an
 * array are both a place and a length, so {@code getArray} of its rows finds the packed array where it lies.
 */
record PackedLists(Batch batch, StructType packed) implements Batch {
  /** Those whose items are held as in Arrow, one after the other. */
  private static final Set<DataType> ITEMS =
      Set.of(
          DataTypes.ByteType,
          DataTypes.ShortType,
          DataTypes.IntegerType,
          DataTypes.LongType,
          DataTypes.FloatType,
          DataTypes.DoubleType);

  private static boolean packs(StructField field) {
    return field.dataType() instanceof ArrayType list && ITEMS.contains(list.elementType());
  }

  /** The columns as they come from Python; {@code columns} itself if none of them is packed. */
  static StructType packed(StructType columns) {
    if (Arrays.stream(columns.fields()).noneMatch(PackedLists::packs)) {
      return columns;
    }
    return new StructType(
        Arrays.stream(columns.fields())
            .map(
                field ->
                    packs(field)
                        ? new StructField(field.name(), DataTypes.BinaryType, field.nullable(), field.metadata())
                        : field)
            .toArray(StructField[]::new));
  }

  /**
   * The types of the columns to pack, by their names. Python is told them, because the table may have got others
   * since they were looked up, and nobody could see it in the bytes.
   */
  static ObjectNode typesOf(StructType columns) {
    ObjectNode types = PythonCalls.JSON.createObjectNode();
    for (StructField field : columns.fields()) {
      if (packs(field)) {
        types.set(field.name(), parsed(field.dataType()));
      }
    }
    return types;
  }

  private static JsonNode parsed(DataType type) {
    try {
      return PythonCalls.JSON.readTree(type.json());
    } catch (JsonProcessingException error) {
      throw Refusals.sneaky(error);
    }
  }

  @Override
  public InputPartition[] planInputPartitions() {
    return batch.planInputPartitions();
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return new Factory(batch.createReaderFactory(), packed);
  }

  private record Factory(PartitionReaderFactory factory, StructType packed) implements PartitionReaderFactory {
    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
      return new Reader(factory.createReader(partition), packed);
    }
  }

  private static final class Reader implements PartitionReader<InternalRow> {
    private final PartitionReader<InternalRow> rows;
    private final StructType packed;
    private UnsafeProjection packing;

    Reader(PartitionReader<InternalRow> rows, StructType packed) {
      this.rows = rows;
      this.packed = packed;
    }

    @Override
    public boolean next() throws IOException {
      return rows.next();
    }

    /** Rows of another kind, as another release of Spark may give, would show bytes and not an array. */
    @Override
    public InternalRow get() {
      InternalRow row = rows.get();
      if (row instanceof UnsafeRow) {
        return row;
      }
      if (packing == null) {
        packing = UnsafeProjection.create(packed);
      }
      return packing.apply(row);
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
